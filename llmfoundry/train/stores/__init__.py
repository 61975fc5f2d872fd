"""Runs in object stores: each works in a folder of this machine, and the store follows."""
