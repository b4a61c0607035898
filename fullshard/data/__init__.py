"""How text becomes batches: reading, chat templates, tokenising once per job, packing, and the order of training."""
