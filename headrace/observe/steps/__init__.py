"""The steps of an engine and the timelines of its requests, for pages and trace viewers.

- `timelines`: a fold that keeps the timeline of each request. `timeline`: one timeline with its spans.
- `book`: a fold that keeps the last steps while a page is open. `record`: one step as a value,
  with the states of all blocks of a pool; a runner that records block tables and copies.
- `document`: steps and requests as one JSON document for the page.
- `perfetto`: steps and timelines in the trace-event format of Perfetto and Chrome.
"""
