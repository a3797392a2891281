package blocks

type checker struct {
	from  int64 // the offset at which the stream started
	next  int64 // the end of the last range, or the first offset requested
	first *Message
	block int64 // the size of FIXED_LENGTH blocks
	empty int   // messages in a row that named no range
}

// mostEmpty bounds messages in a row that name no range, which a server could send for ever.
const mostEmpty = 1000

// check refuses a message that CSI does not allow, and cuts off what was not requested.
func (c *checker) check(m Message) (Message, error) {
	if err := c.checkHead(m); err != nil {
		return m, err
	}
	if c.empty++; len(m.Ranges) > 0 {
		c.empty = 0
	}
	if c.empty > mostEmpty {
		return m, wrong("%d messages in a row report nothing", c.empty)
	}
	ranges := make([]Range, 0, len(m.Ranges))
	for _, r := range m.Ranges {
		if err := c.checkRange(m, r); err != nil {
			return m, err
		}
		// The first range of a stream may begin before the requested offset.
		cut := max(r.Offset, c.from)
		c.next = r.End()
		ranges = append(ranges, Range{Offset: cut, Size: c.next - cut})
	}
	m.Ranges = ranges
	return m, nil
}

func (c *checker) checkHead(m Message) error {
	if c.first == nil {
		c.first = &Message{Type: m.Type, Capacity: m.Capacity}
	}
	switch {
	case m.Type != FixedLength && m.Type != VariableLength:
		return wrong("block_metadata_type is %d, which is neither FIXED_LENGTH nor VARIABLE_LENGTH", m.Type)
	case m.Type != c.first.Type:
		return wrong("block_metadata_type was %d and is %d now", c.first.Type, m.Type)
	case m.Capacity <= 0:
		return wrong("volume_capacity_bytes is %d", m.Capacity)
	case m.Capacity != c.first.Capacity:
		return wrong("volume_capacity_bytes was %d and is %d now", c.first.Capacity, m.Capacity)
	}
	return nil
}

func (c *checker) checkRange(m Message, r Range) error {
	switch {
	case r.Size <= 0 || r.Offset < 0 || r.Offset > m.Capacity-r.Size:
		return wrong("%d bytes at byte %d are not inside the volume's %d bytes", r.Size, r.Offset, m.Capacity)
	case r.Offset < c.next && (c.next > c.from || r.End() <= c.from):
		return wrong("%d bytes at byte %d come after byte %d was reached: ranges must ascend and not overlap", r.Size, r.Offset, c.next)
	}
	if m.Type != FixedLength {
		return nil
	}
	if c.block == 0 {
		c.block = r.Size
	}
	// The size of a volume need not be a multiple of a block: the last block may be shorter.
	if r.Size != c.block && (r.Size > c.block || r.End() != m.Capacity) {
		return wrong("a block has %d bytes where the first had %d, although the type is FIXED_LENGTH", r.Size, c.block)
	}
	return nil
}
