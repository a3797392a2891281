// Package kata tests the Kata handler on real filesystems.
package kata
