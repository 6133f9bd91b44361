"""Text: tokens to characters and back, chat templates, stop strings. Nothing here knows about requests or wires."""
