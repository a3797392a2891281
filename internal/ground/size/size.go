// Package size reads sizes as Kubernetes writes them.
package size

import (
	"errors"
	"fmt"
	"math"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"
)

// Parse reads a quantity: 20Gi, 1.5Ti, 10G, 4096.
func Parse(text string) (int64, error) {
	digits := strings.TrimRight(text, "BEGKMPTik")
	size, err := resource.ParseQuantity(strings.TrimSuffix(text, "B"))
	if err != nil || strings.Trim(digits, "0123456789.") != "" {
		return 0, fmt.Errorf("%q is no size; write it as 20Gi, 500Mi or in bytes", text)
	}
	// A quantity that is too large becomes the largest number.
	if n := size.Value(); n > 0 && n < math.MaxInt64 {
		return n, nil
	}
	return 0, errors.New(text + " is out of range: a size is more than 0 and less than 8Ei")
}

// Flag is the value of a flag: a number of bytes, or 0 for none.
type Flag int64

// Type is what the help calls the value.
func (f *Flag) Type() string { return "size" }

// String formats the value for the help.
func (f *Flag) String() string { return resource.NewQuantity(int64(*f), resource.BinarySI).String() }

// Set reads the value.
func (f *Flag) Set(text string) error {
	if text == "0" {
		*f = 0
		return nil
	}
	n, err := Parse(text)
	*f = Flag(n)
	return err
}
