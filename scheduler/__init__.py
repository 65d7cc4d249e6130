"""Pure decisions about what each step computes: no torch, no Ray, no I/O, no clock."""
