package scan

import "fmt"

// String names a file for a person.
func (f File) String() string {
	if f.Block {
		return fmt.Sprintf("the device %d:%d", f.Major, f.Minor)
	}
	return fmt.Sprintf("the image %d:%d inode %d", f.Major, f.Minor, f.Inode)
}
