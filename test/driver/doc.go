// Package driver runs crust-driver on the real kernel.
package driver
