// Command hit passes a failpoint, for the tests of the package.
package main

import (
	"fmt"

	"github.com/crust-proxy/crust-proxy/internal/ground/failpoint"
)

func main() {
	failpoint.Hit("a-place-in-the-program")
	fmt.Println("first")
	failpoint.Hit("a-place-in-the-program")
	fmt.Println("second")
}
