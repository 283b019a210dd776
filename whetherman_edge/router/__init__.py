"""ToolRouter: which of the caller's tools fits a query, in tens of microseconds, from their descriptions alone.

``artifact`` maps the one file, ``table`` turns text into pooled int8 rows, ``card`` turns a tool into texts,
``scorer`` scores a slate, ``decision`` holds the typed answer.
"""
