"""One function for each script: recipe in, result out."""
