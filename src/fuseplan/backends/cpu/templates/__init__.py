"""The CPU's kernel templates; `order` lists them. A choice that is kept imports its own template alone."""
