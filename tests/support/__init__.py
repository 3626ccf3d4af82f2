"""Tools that tests share: a pool of forked gloo workers, an adversarial process group."""
