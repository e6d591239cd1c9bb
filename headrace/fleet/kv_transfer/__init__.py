"""KV transfer between servers: one publishes the blocks of its prefix cache, others pull missing blocks.

```
 publishing server                                      pulling server
 prefix cache ──> published <── exporter <──keys──────── importer <── core (`Peers`), mover (`PeerReader`)
                      └──copy──> area ──read by the view──> pages of host memory
```
Blocks are named by their content keys, which contain the tenant's salt. The publishing server pins nothing for a peer:
it copies a block into the connection's area, and then checks that the block still had this content. So a lost peer
leaves no state behind. In reading order:

- `shared_memory`: the interface for transferring the bytes of blocks, and transfer between processes of one machine.
- `nixl`: also between machines.
- `wire`: messages and the handshake.
- `exporter`: the readable blocks, and the threads that serve peers.
- `link`: the clients of all peers.
"""
