"""What a run is: typed, checked, torch-free."""
