"""DDK (arXiv 2407.16154): distillation that samples each domain by the student's gap to the teacher."""
