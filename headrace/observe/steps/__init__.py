"""The steps of an engine and the lives of its requests, as the pages and trace viewers show them.

- `timelines`: a fold that keeps the life of each request. `life`: one of them, with its spans.
- `book`: a fold that keeps the last steps while somebody looks. `record`: one step as a value.
- `tables`: block tables and copies, seen beside a runner. `memory`: all blocks of a pool as a picture.
- `film`: steps and requests as one JSON document, which the page draws.
- `perfetto`: steps and lives in the trace-event format of Perfetto and Chrome.
"""
