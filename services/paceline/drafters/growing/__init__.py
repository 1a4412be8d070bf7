"""How a tree grows with a drafter: in a draft replica, and by a head inside the target."""
