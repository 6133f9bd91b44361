"""The paper's figures again, by the serving core in the simulator: one module each, results in docs/paper.md."""
