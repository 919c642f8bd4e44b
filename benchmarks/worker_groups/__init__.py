"""Several worker groups under one scheduler, in modelled time."""
