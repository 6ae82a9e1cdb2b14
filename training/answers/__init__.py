"""Answers of the target to train on: in process or from a server, in a file that can go on."""
