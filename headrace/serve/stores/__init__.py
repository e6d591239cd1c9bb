"""Where kept answers lie: bytes under keys, in this process, in a file, or shared over the network."""
