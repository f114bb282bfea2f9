"""Tables, plots and pages, made only from run records."""
