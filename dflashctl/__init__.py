"""dflashctl: deploy a DFlash trainer to GPU hosts, launch runs by hypothesis, and follow them."""
