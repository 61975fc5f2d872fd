"""report.html and gauntlet.html: pages that need nothing but themselves."""
