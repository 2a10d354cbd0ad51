"""What comes out when it is tried? One file for each experiment, which prints its table and writes its figures."""
