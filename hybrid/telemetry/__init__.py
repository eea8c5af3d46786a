"""What a run shows and leaves to read: `metrics` (a line per step), `samples`, `console`, `wandb`, `gpu`."""
