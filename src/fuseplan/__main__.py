"""`python -m fuseplan`: the command `fuseplan`."""

from fuseplan.cli import main

if __name__ == "__main__":
    main()
