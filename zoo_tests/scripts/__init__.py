"""Short plain training scripts as found in tutorials, each run as it is and with the lines that the README changes."""
