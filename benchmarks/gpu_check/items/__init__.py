"""What a check starts as processes of their own: measurements, and the plugin of its runs."""
