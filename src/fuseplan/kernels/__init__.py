"""The computation of one launch: operators matched and lowered, and the templates that can run them."""
