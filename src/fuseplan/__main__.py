"""`python -m fuseplan`: the command `fuseplan`."""

from fuseplan.cli import main

main()
