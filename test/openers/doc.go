// Package openers tests package internal/ground/openers on real kernels: that of this machine, and that of a
// guest. What both kernels are asked is here, for the tests and for the guest's program.
package openers
