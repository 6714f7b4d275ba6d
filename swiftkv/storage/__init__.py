"""Storage below the pools: blocks that outlive their process, behind one interface."""
