"""What may be answered without computing, and under which name: decisions and values, no stores and no clock.

The road of a look-up is `serve.recall`; the stores that keep the bytes are in `serve.stores`.
"""
