"""The steps of an engine and the timelines of its requests, for pages and trace viewers.

- `timelines`: the timeline of a request with its spans, and a fold that keeps that of each request.
- `book`: a fold that keeps the last steps while a page is open. `record`: one step as a value, with the states of all
  blocks of a pool; a runner that records block tables and copies.
- `document`: steps and timelines as one JSON document for the page, and in the trace-event format of Perfetto and
  Chrome.
"""
