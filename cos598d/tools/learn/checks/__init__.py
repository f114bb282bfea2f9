"""What must hold in each lesson, a file a lesson: driven on every rank, judged where no student's code runs."""
