"""Blocks of the KV cache between servers: one publishes what its prefix cache holds, others pull what they lack.

```
 publishing server                                      pulling server
 prefix cache ──> published <── exporter <──keys──────── importer <── core (`Peers`), mover (`PeerReader`)
                      └──copy──> area ──read by the view──> pages of host memory
```
Blocks are named by their content keys, which contain the tenant's salt. The publishing server holds nothing for a peer:
it copies a block into the connection's own area, and looks afterwards whether the block still had this content. So a
peer that is lost at any moment leaves nothing behind. In reading order:

- `port`: how the bytes of blocks get from one process to another.
- `shared_memory`: between processes of one machine. `nixl`: also between machines.
- `wire`: messages and the handshake.
- `published`: what can be read here. `exporter`: answers peers.
- `link`: one peer, as its client sees it. `importer`: all of them.
"""
