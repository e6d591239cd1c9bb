"""How many devices a workload needs: rooflines by hand, searched first, then confirmed by the simulator."""
