"""How a run is spread: launch, mesh, FSDP2 and DDP."""
