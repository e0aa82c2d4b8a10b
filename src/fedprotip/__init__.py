"""fedprotip: federated continual learning without replay."""
