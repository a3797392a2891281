package kata

import (
	"errors"
	"strconv"
	"strings"
	"unicode/utf8"
)

// value is one value of Rust's derived Debug text: a name with what follows it,
// a number, a string, or a list.
type value struct {
	kind   valueKind
	text   string           // the name, the number's digits, or the string
	fields map[string]value // of Name { field: value, ... }
	items  []value          // of [ ... ] and Name( ... )
}

type valueKind uint8

const (
	nameValue valueKind = iota
	numberValue
	stringValue
	listValue
)

const maxDepth = 16

var errDebugText = errors.New("it is not the debug text of stats")

// debugParser reads Rust's debug text, strictly: every byte belongs to the
// grammar. The text comes from a guest, so depth is bounded, and the length is
// by the caller.
type debugParser struct {
	rest string
}

// literal takes exactly s.
func (p *debugParser) literal(s string) error {
	p.space()
	rest, ok := strings.CutPrefix(p.rest, s)
	if !ok {
		return errDebugText
	}
	p.rest = rest
	return nil
}

func (p *debugParser) space() { p.rest = strings.TrimLeft(p.rest, " \n\t") }

// next is the first byte of what comes, 0 at the end.
func (p *debugParser) next() byte {
	p.space()
	if p.rest == "" {
		return 0
	}
	return p.rest[0]
}

func (p *debugParser) value(depth int) (value, error) {
	if depth > maxDepth {
		return value{}, errDebugText
	}
	switch c := p.next(); {
	case c == '"':
		text, err := p.string()
		return value{kind: stringValue, text: text}, err
	case c == '[':
		items, err := p.items('[', ']', depth)
		return value{kind: listValue, items: items}, err
	case c == '(':
		items, err := p.items('(', ')', depth)
		return value{kind: listValue, items: items}, err
	case c == '{':
		return p.mapping(depth)
	case c == '-', isDigit(c):
		return p.number()
	case isNameStart(c):
		return p.named(depth)
	default:
		return value{}, errDebugText
	}
}

func isDigit(c byte) bool { return c >= '0' && c <= '9' }

func isNameStart(c byte) bool {
	return c == '_' || 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z'
}

// number takes digits with an optional sign and fraction.
func (p *debugParser) number() (value, error) {
	n := 1
	for n < len(p.rest) && (isDigit(p.rest[n]) || p.rest[n] == '.' && n+1 < len(p.rest) && isDigit(p.rest[n+1])) {
		n++
	}
	text := p.rest[:n]
	p.rest = p.rest[n:]
	if text == "-" || p.rest != "" && isNameStart(p.rest[0]) {
		return value{}, errDebugText
	}
	return value{kind: numberValue, text: text}, nil
}

func (p *debugParser) name() (string, error) {
	if !isNameStart(p.next()) {
		return "", errDebugText
	}
	n := 1
	for n < len(p.rest) && (isNameStart(p.rest[n]) || isDigit(p.rest[n])) {
		n++
	}
	name := p.rest[:n]
	p.rest = p.rest[n:]
	return name, nil
}

// named takes Name, Name(value, ...) or Name { field: value, ... }.
func (p *debugParser) named(depth int) (value, error) {
	name, err := p.name()
	if err != nil {
		return value{}, err
	}
	v := value{kind: nameValue, text: name}
	switch p.next() {
	case '(':
		v.items, err = p.items('(', ')', depth)
	case '{':
		v.fields, err = p.fields(depth)
	}
	return v, err
}

// items takes a bracketed list, with or without a comma at its end.
func (p *debugParser) items(open, end byte, depth int) ([]value, error) {
	if err := p.literal(string(open)); err != nil {
		return nil, err
	}
	var items []value
	for p.next() != end {
		item, err := p.value(depth + 1)
		if err != nil {
			return nil, err
		}
		items = append(items, item)
		if err := p.separator(end); err != nil {
			return nil, err
		}
	}
	return items, p.literal(string(end))
}

// separator takes a comma, which only an end may stand in for.
func (p *debugParser) separator(end byte) error {
	if p.next() == end {
		return nil
	}
	return p.literal(",")
}

func (p *debugParser) fields(depth int) (map[string]value, error) {
	if err := p.literal("{"); err != nil {
		return nil, err
	}
	fields := make(map[string]value)
	for p.next() != '}' {
		if strings.HasPrefix(p.rest, "..") { // of a type that does not show all
			p.rest = p.rest[2:]
			break
		}
		name, field, err := p.field(depth)
		if err != nil {
			return nil, err
		}
		if _, twice := fields[name]; twice {
			return nil, errDebugText
		}
		fields[name] = field
		if err := p.separator('}'); err != nil {
			return nil, err
		}
	}
	return fields, p.literal("}")
}

func (p *debugParser) field(depth int) (string, value, error) {
	name, err := p.name()
	if err != nil {
		return "", value{}, err
	}
	if err := p.literal(":"); err != nil {
		return "", value{}, err
	}
	v, err := p.value(depth + 1)
	return name, v, err
}

// mapping takes {key: value, ...} and keeps nothing of it: only fields that we
// do not read are maps.
func (p *debugParser) mapping(depth int) (value, error) {
	if err := p.literal("{"); err != nil {
		return value{}, err
	}
	for p.next() != '}' {
		if _, err := p.value(depth + 1); err != nil {
			return value{}, err
		}
		if p.next() == ':' {
			p.rest = p.rest[1:]
			if _, err := p.value(depth + 1); err != nil {
				return value{}, err
			}
		}
		if err := p.separator('}'); err != nil {
			return value{}, err
		}
	}
	return value{kind: listValue}, p.literal("}")
}

// string takes a quoted string with Rust's escapes.
func (p *debugParser) string() (string, error) {
	var out strings.Builder
	rest := p.rest[1:]
	for {
		n := strings.IndexAny(rest, `"\`)
		if n < 0 || !utf8.ValidString(rest[:n]) {
			return "", errDebugText
		}
		out.WriteString(rest[:n])
		if rest[n] == '"' {
			p.rest = rest[n+1:]
			return out.String(), nil
		}
		r, size, err := unescapeRust(rest[n:])
		if err != nil {
			return "", err
		}
		out.WriteRune(r)
		rest = rest[n+size:]
	}
}

// unescapeRust reads one escape, which begins with a backslash, and its length.
func unescapeRust(s string) (rune, int, error) {
	if len(s) < 2 {
		return 0, 0, errDebugText
	}
	switch s[1] {
	case 'n':
		return '\n', 2, nil
	case 'r':
		return '\r', 2, nil
	case 't':
		return '\t', 2, nil
	case '0':
		return 0, 2, nil
	case '\\', '"', '\'':
		return rune(s[1]), 2, nil
	case 'u':
		return unescapeUnicode(s)
	default:
		return 0, 0, errDebugText
	}
}

func unescapeUnicode(s string) (rune, int, error) {
	end := strings.IndexByte(s, '}')
	if end < len(`\u{0`) || end > len(`\u{10ffff`) || s[2] != '{' {
		return 0, 0, errDebugText
	}
	n, err := strconv.ParseUint(s[3:end], 16, 32)
	if err != nil || n > utf8.MaxRune || !utf8.ValidRune(rune(n)) {
		return 0, 0, errDebugText
	}
	return rune(n), end + 1, nil
}
