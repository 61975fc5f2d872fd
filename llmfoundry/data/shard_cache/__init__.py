"""Files of a data set from anywhere: copied ahead, checked, kept within a limit."""
