"""What load looks like and how its latencies are summed up: shared by the benchmark client and the simulator. Pure."""
