package guard

import (
	"path"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/crust-proxy/crust-proxy/internal/sys"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

const maxPath = 4095 // PATH_MAX less its NUL

// CheckPath accepts an absolute path of printable UTF-8 without "..". The field names the
// path in errors.
func CheckPath(field, p string) error {
	switch {
	case p == "":
		return volume.Errorf(volume.Invalid, "%s is empty: it is required", field)
	case len(p) > maxPath:
		return volume.Errorf(volume.Invalid, "%s is %d bytes long: more than the %d that a path may have", field, len(p), maxPath)
	case !utf8.ValidString(p):
		return volume.Errorf(volume.Invalid, "%s is not valid UTF-8", field)
	case !Printable(p):
		return volume.Errorf(volume.Invalid, "%s %q holds control characters", field, sys.Clip(p))
	case !path.IsAbs(p):
		return volume.Errorf(volume.Invalid, "%s %q is not an absolute path", field, sys.Clip(p))
	}
	for part := range strings.SplitSeq(p, "/") {
		if part == ".." {
			return volume.Errorf(volume.Invalid, "%s %q climbs with \"..\": give the path it leads to", field, sys.Clip(p))
		}
		if len(part) > 255 {
			return volume.Errorf(volume.Invalid, "%s has a name of %d bytes: more than the 255 that a name may have", field, len(part))
		}
	}
	return nil
}

// Printable reports whether a text is valid UTF-8 without control characters.
func Printable(s string) bool {
	return utf8.ValidString(s) && !strings.ContainsFunc(s, unicode.IsControl)
}
