"""Charts, and the pages that are made from results: docs/measured.md, docs/speed.md and their like."""
