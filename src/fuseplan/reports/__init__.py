"""Reports on models: what became of each operator, and why.

- report: the record, its text, and its JSON; rows: the records in it
- page: the report as HTML, with page.css and page.js
- books: the report on a cut graph, and on a run's steps; tried: all plans that were tried for an operator
- comparison: a run beside float64, and the first step that is too far from it
- difference: two reports on one model; profile: the time of each operator before a model is fused
"""
