"""What is drawn and written: charts, the reference pages, docs/measured.md."""
