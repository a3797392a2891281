// Package sys has small helpers that several packages need.
package sys

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"path"
	"reflect"
	"regexp"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"unicode"
	"unicode/utf8"
)

// Rarely reports whether what happens the n-th time is worth a line: the first, second, fourth, eighth time and so on.
func Rarely(n int64) bool { return n&(n-1) == 0 }

// Clip shortens a long value, so that a hostile value cannot fill a log.
func Clip(s string) string { return ClipTo(s, 256) }

// ClipTo shortens a longer text to at most that many bytes, without cutting a character, and appends "...".
func ClipTo(s string, most int) string {
	if len(s) <= most {
		return s
	}
	for most > 0 && !utf8.RuneStart(s[most]) {
		most--
	}
	return s[:most] + "..."
}

// IsText reports whether s is valid UTF-8 of printable characters.
func IsText(s string) bool {
	notASCII := func(r rune) bool { return r < ' ' || r > '~' } // most texts have none
	return !strings.ContainsFunc(s, notASCII) || utf8.ValidString(s) && !strings.ContainsFunc(s, func(r rune) bool { return !IsPrintable(r) })
}

// IsPrintable reports whether a character can be seen, or is the ASCII space. Controls, marks of direction,
// characters of no width, separators of lines, tags and variation selectors hide text or change how it reads.
func IsPrintable(r rune) bool {
	return unicode.IsPrint(r) && !unicode.In(r, unicode.Other_Default_Ignorable_Code_Point, unicode.Variation_Selector)
}

// LazyRegexp compiles a pattern at its first use. crust-runc is started for each step of each
// container, and does not compile patterns that it never matches.
func LazyRegexp(pattern string) func() *regexp.Regexp {
	return sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(pattern) })
}

var (
	driverForm = LazyRegexp(`^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$`)
	podUIDForm = LazyRegexp(`^[A-Za-z0-9][A-Za-z0-9-]{0,63}$`)
)

// IsDriverName reports whether CSI allows a text as the name of a driver. Such a name is safe as a part of a path.
func IsDriverName(s string) bool { return driverForm().MatchString(s) }

// IsEmptyDir reports whether a volume's target is that of an emptyDir. Kata itself puts those on
// block devices (its emptydir_mode).
func IsEmptyDir(target string) bool { return path.Base(path.Dir(target)) == "kubernetes.io~empty-dir" }

// IsPodUID reports whether a text can be the UID of a pod, and is safe as a part of a path. It
// is not strict: static pods have a hash for a UID.
func IsPodUID(s string) bool { return podUIDForm().MatchString(s) }

// KindWord describes, for a person, which values a configuration key of this type accepts.
func KindWord(as reflect.Type) string {
	switch as.Kind() {
	case reflect.Bool:
		return "true or false"
	case reflect.String:
		return "text"
	case reflect.Float32, reflect.Float64:
		return "a number"
	case reflect.Slice, reflect.Array:
		return "a list"
	case reflect.Struct, reflect.Map:
		return "a map of keys and values"
	case reflect.Pointer:
		return KindWord(as.Elem())
	case reflect.Uint32:
		return "a whole number from 0 to " + strconv.Itoa(math.MaxUint32)
	default:
		return "a whole number"
	}
}

// PrintVersion prints what every program prints for --version.
func PrintVersion(out io.Writer, program string) {
	_, _ = io.WriteString(out, program+" version "+Version()+"\n")
}

// Version is the version of this program, as the build stamped it from git.
func Version() string {
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "unknown"
}

// EncodeJSON encodes a record of at most limit bytes, the size up to which it is read back. A
// longer record is an error. HTML is not escaped, because that can make a text six times as long.
func EncodeJSON(value any, limit int) ([]byte, error) {
	var b bytes.Buffer
	encoder := json.NewEncoder(&b)
	encoder.SetEscapeHTML(false)
	if err := encoder.Encode(value); err != nil {
		return nil, err
	}
	raw := bytes.TrimSuffix(b.Bytes(), []byte("\n"))
	if len(raw) > limit {
		return nil, fmt.Errorf("it has %d bytes as JSON, more than the %d that are read back", len(raw), limit)
	}
	return raw, nil
}
