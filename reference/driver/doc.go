// Package driver is crust-proxy's reference CSI driver. A volume is a sparse
// image file in a data directory, attached by a loop device.
//
// What it knows lies in two places, and nowhere else: one record file a volume in
// the data directory, and the kernel (which loop device is over which image, what
// is mounted where). Nothing is kept in memory, so it may be killed at any point;
// the same call then does what was left. An intent is recorded before it is
// carried out, and forgotten after it was undone.
package driver
