"""Several front ends before one server (``--api-server-count``): HTTP and text there, everything else here.

```
 client ──> front end: parse, render, encode, constrain ── OPEN, CLOSE, STOP ──> owner: caches, admission, engine
        <── detokenize, JSON, server-sent events         <── OPENED, EVENTS ──
        ──> all other routes ──────────── HTTP over a Unix socket ──────────> owner
```

- `messages`: what crosses, as values.
- `owner`: the side that has the caches and the engine.
- `front`: the side that answers clients, and its routes.
- `pictures`: both sides of images.
- `pooling`: both sides of embeddings, reranking and scores.
"""
