// Package printer writes a command's result: tables and lines for people; names, JSON, YAML and
// what a template makes of them for programs. Whatever it writes is safe for a terminal.
package printer

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"unicode/utf8"

	"golang.org/x/term"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"sigs.k8s.io/yaml"

	"github.com/crust-proxy/crust-proxy/internal/tool/show"
)

// The output formats.
const (
	FormatTable = "table"
	FormatWide  = "wide"
	FormatJSON  = "json"
	FormatYAML  = "yaml"
	FormatName  = "name" // only ids or names, one per line
)

// FormatsHelp describes the output formats.
const FormatsHelp = "table, wide, name, json, yaml, jsonpath=... or go-template=..."

// Formats lists the output formats, and how those with a template begin.
func Formats() []string {
	return []string{FormatTable, FormatWide, FormatName, FormatJSON, FormatYAML, formatJSONPath, formatTemplate}
}

// Printer writes one command's result.
type Printer struct {
	Out io.Writer
	// Format is one of Formats, with its template: the value of --output.
	Format string
	// Templates is ParseTemplate for a program that offers templates: it links what they need.
	Templates func(format string) (Template, error)
	// Names is the go-template of FormatName, or empty if results have no names.
	Names string
	// Colour allows colours; UseColour decides it.
	Colour bool

	template Template // of Format, once Check has read it
}

// UseColour reports whether to colour the output: on a terminal, unless the environment says not to.
func UseColour(terminal bool, getenv func(string) string) bool {
	return terminal && getenv("NO_COLOR") == "" && getenv("TERM") != "dumb"
}

// IsTerminal reports whether a file is a terminal.
func IsTerminal(f *os.File) bool { return term.IsTerminal(int(f.Fd())) }

// Width returns the width of a terminal in characters, or 80 if it is unknown.
func Width(f *os.File) int {
	width, _, _ := term.GetSize(int(f.Fd())) // negative if it fails
	return cmp.Or(max(0, width), 80)
}

// Check reads the format. It refuses an unknown one, a template with a mistake, and names of a result that has none.
func (p *Printer) Check() (err error) {
	format := p.Format
	switch format {
	case FormatTable, FormatWide, FormatJSON, FormatYAML:
		return nil
	case FormatName:
		if p.Names == "" {
			return errors.New("--output name: what this command prints has no names")
		}
		format = formatTemplate + p.Names
	}
	if p.Templates == nil {
		return fmt.Errorf("--output %q is not table, wide, json or yaml", p.Format)
	}
	p.template, err = p.Templates(format)
	return err
}

// Machine reports whether the output is for a program.
func (p *Printer) Machine() bool { return p.Format != FormatTable && p.Format != FormatWide }

// Wide reports whether tables have all columns.
func (p *Printer) Wide() bool { return p.Format == FormatWide }

// Paint colours text if colours are allowed.
func (p *Printer) Paint(code, text string) string {
	if code == show.Plain || !p.Colour {
		return text
	}
	return code + text + show.Reset
}

// Line prints a text of ours, which may contain text from elsewhere.
func (p *Printer) Line(text string) error {
	_, err := io.WriteString(p.Out, show.EscapeLines(text)+"\n")
	return err
}

// Field is one labelled line of a report: the label is coloured, the text is escaped.
func (p *Printer) Field(indent int, label, text string) string {
	return fmt.Sprintf("\n%*s%s %s", indent, "", p.Paint(show.Bold, label), show.Escape(text))
}

// Table prints a table and removes its rows, so that more rows can follow in the same columns.
func (p *Printer) Table(t *Table) error {
	t.fit(p.Wide())
	var b strings.Builder
	for _, row := range t.rows {
		for i, c := range row {
			b.WriteString(p.Paint(c.code, c.text))
			if i < len(row)-1 {
				b.WriteString(strings.Repeat(" ", t.Widths[i]-c.width()+3))
			}
		}
		b.WriteByte('\n')
	}
	t.rows = nil
	_, err := io.WriteString(p.Out, b.String())
	return err
}

// Result prints a value or a message: encoded for a program, or by calling people.
func (p *Printer) Result(v any, people func() error) error {
	if p.Machine() {
		return p.JSON(v)
	}
	return people()
}

// JSON prints a value or a message for a program, as JSON or YAML.
func (p *Printer) JSON(v any) error { return p.encode("", v, "  ") }

// Document prints one message of a stream: a line of JSON, or a YAML document.
func (p *Printer) Document(m proto.Message) error {
	if p.Format == FormatYAML {
		return p.encode("---\n", m, "  ")
	}
	return p.encode("", m, "")
}

func (p *Printer) encode(before string, v any, indent string) error {
	text, err := toJSON(v, indent)
	switch {
	case err != nil:
	case p.template != nil:
		text, err = p.template.fill(text)
	case p.Format == FormatYAML:
		text, err = toYAML(text)
	}
	if err != nil {
		return err
	}
	_, err = io.WriteString(p.Out, before+string(text))
	return err
}

// Object is a message as a program reads it.
type Object struct {
	Message proto.Message
}

// MarshalJSON writes zero numbers and empty lists too, so that a program finds every key.
func (o Object) MarshalJSON() ([]byte, error) {
	return protojson.MarshalOptions{EmitDefaultValues: true}.Marshal(o.Message)
}

// Objects makes a list of messages. An empty list is not nil: its JSON is [].
func Objects[M proto.Message](messages []M) []Object {
	all := make([]Object, len(messages))
	for i, m := range messages {
		all[i] = Object{m}
	}
	return all
}

// toJSON encodes a value or a message, and removes the random spaces of protojson.
func toJSON(v any, indent string) ([]byte, error) {
	if m, ok := v.(proto.Message); ok {
		v = Object{m}
	}
	var b bytes.Buffer
	encoder := json.NewEncoder(&b)
	encoder.SetEscapeHTML(false)
	encoder.SetIndent("", indent)
	if err := encoder.Encode(v); err != nil {
		return nil, fmt.Errorf("write JSON: %w", err)
	}
	return show.EscapeJSON(b.Bytes()), nil
}

// toYAML converts JSON to YAML. The YAML writer leaves some control characters as they
// are; then the JSON is used instead, which is valid YAML and has them escaped.
func toYAML(asJSON []byte) ([]byte, error) {
	text, err := yaml.JSONToYAML(asJSON)
	if err != nil {
		return nil, fmt.Errorf("write YAML: %w", err)
	}
	if show.EscapeLines(string(text)) != string(text) {
		return asJSON, nil
	}
	return text, nil
}

// Nothing is the text of an empty cell.
const Nothing = "-"

// Cell is one field of a table. Its text is escaped when the cell is made, so that no table can fail to do it.
type Cell struct{ text, code string }

// Text is a cell without a colour.
func Text(s string) Cell { return Cell{text: show.Escape(cmp.Or(s, Nothing))} }

// Painted is a cell with a colour, unless it is empty.
func Painted(code, s string) Cell {
	return Cell{text: Text(s).text, code: show.When(s != "", code)}
}

// YesNo is a green yes or a red no.
func YesNo(yes bool) Cell {
	return show.Either(yes, Painted(show.Green, "yes"), Painted(show.Red, "no"))
}

func (c Cell) width() int { return utf8.RuneCountInString(c.text) }

// Table is aligned columns.
type Table struct {
	// Widths are the columns' least widths; they grow with what is printed.
	Widths []int
	wide   []bool // columns that only a wide table has
	rows   [][]Cell
}

// NewTable makes a table with a heading, in which columns that only a wide table has begin with a +. A table without a
// heading is a &Table{}.
func NewTable(heading ...string) *Table {
	row, wide := make([]Cell, len(heading)), make([]bool, len(heading))
	for i, h := range heading {
		h, wide[i] = strings.CutPrefix(h, "+")
		row[i] = Painted(show.Bold, h)
	}
	return &Table{wide: wide, rows: [][]Cell{row}}
}

// Add appends a row.
func (t *Table) Add(row ...Cell) { t.rows = append(t.rows, row) }

// Pair appends a label and its value.
func (t *Table) Pair(label, value string) { t.Add(Text(label), Text(value)) }

func (t *Table) fit(wide bool) {
	for n, row := range t.rows {
		shown := row[:0]
		for i, c := range row {
			if wide || i >= len(t.wide) || !t.wide[i] {
				shown = append(shown, c)
			}
		}
		t.Widths = append(t.Widths, make([]int, max(0, len(shown)-len(t.Widths)))...)
		for i, c := range shown {
			t.Widths[i] = max(t.Widths[i], c.width())
		}
		t.rows[n] = shown
	}
}
