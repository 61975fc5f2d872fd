"""Whether machines are sound: `probes` read and measure, the files beside it decide."""
