"""What the paper never showed, and what others found of it: studies with the simulator, driving the serving core."""
