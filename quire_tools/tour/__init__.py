"""`quire tour`: one screen per mechanism, drawn from a live stack and judged by its own checks.

`route` has the stops in order, `stage` the stack that they drive, `screen` what they return; `guide` runs
them, `page` makes the HTML.
"""
